"""A server of tools that misbehaves as it is told, over stdin and stdout or over HTTP."""

import itertools
import json
import sys
import time

NOISE = {"jsonrpc": "2.0", "method": "notifications/progress"}
TOOL = {"name": "add", "description": "Adds.", "inputSchema": {"type": "object"}}
CONTENTS = {
    "an image": [{"type": "image", "data": "AAAA", "mimeType": "image/png"}],
    "no content": "text",
    "half a text": [{"type": "text", "text": "5"}, {"type": "audio"}],
}
LISTS = {
    "two tools of one name": [TOOL, TOOL],
    "a bad schema": [{**TOOL, "inputSchema": {"type": "nothing"}}],
    "a schema elsewhere": [{**TOOL, "inputSchema": {"$ref": "http://127.0.0.1:9/schema"}}],
    "a bad name": [{**TOOL, "name": "add\n"}],
    "too many tools": [{**TOOL, "name": f"t{n}"} for n in range(129)],
    "a list that is none": {"tools": []},
}


def result_of(how, method):
    if method == "initialize":
        versions = {"another protocol": "1", "an older protocol": "2025-03-26"}
        version = versions.get(how, "2025-06-18")
        offered = {} if how == "no tools" else {"tools": {}}
        return {"protocolVersion": version, "capabilities": offered}
    if method == "tools/list":
        endless = {"nextCursor": "more"} if how == "endless pages" else {}
        return {"tools": LISTS.get(how, [TOOL]), **endless}
    text = [{"type": "text", "text": "5"}]
    return {"content": CONTENTS.get(how, text), "isError": how == "an error"}


def replies(how, asked):
    """The texts that answer a request."""
    identity = asked["id"]
    if asked["method"] == "tools/call":
        if how == "hangs":
            time.sleep(3600)
        elif how == "dies":
            sys.exit("out of luck")
        elif how == "floods":
            yield "x" * 100_000_000
        elif how == "chatters":
            yield from itertools.repeat(json.dumps(NOISE))
        elif how == "prints for ever":
            yield from itertools.repeat("\n" * 10_000)
        elif how == "eats memory":
            bytearray(1 << 40)
        elif how == "a large answer":
            yield json.dumps({"id": identity, "result": "x" * 5000})
            return
        elif how == "another's answer":
            yield json.dumps({"id": identity + 1, "result": {"content": []}})
            yield json.dumps({"id": str(identity), "result": {"content": []}})
            return
        elif how == "not JSON":
            yield "Traceback: [1, 2"
        elif how == "deep":
            yield "[" * 4000
        elif how == "neither":
            yield json.dumps({"id": identity})
            return
        elif how == "asks back":
            yield json.dumps({"id": "mine", "method": "sampling/createMessage"})
        elif how == "refuses":
            yield json.dumps({"id": identity, "error": {"code": -1, "message": "not today"}})
            return
    yield json.dumps({"jsonrpc": "2.0", "id": identity, "result": result_of(how, asked["method"])})


def main(how):
    if how == "hangs at the start":
        time.sleep(3600)
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" in asked and "method" in asked:
            for reply in replies(how, asked):
                print(reply, flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
