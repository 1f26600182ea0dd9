"""A server of tools that speaks MCP over stdin and stdout, with the standard library only.

It adds, multiplies, and looks prices up. A server that uses the package ``mcp`` is written like
this::

    from mcp.server.mcpserver import MCPServer

    server = MCPServer("calculator")

    @server.tool()
    def add(a: int, b: int) -> int:
        return a + b

    server.run("stdio")
"""

import json
import sys

PRICES = {"apple": 3, "bread": 4, "cheese": 11}
NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
TOOLS = {
    "add": ("Adds two integers.", NUMBERS, lambda a, b: a + b),
    "multiply": ("Multiplies two integers.", NUMBERS, lambda a, b: a * b),
    "price": (
        "Returns the price of a good.",
        {"good": {"enum": sorted(PRICES)}},
        lambda good: PRICES[good],
    ),
}


def listed() -> list[dict[str, object]]:
    """Describes the tools as MCP does."""
    return [
        {
            "name": name,
            "description": text,
            "inputSchema": {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            },
        }
        for name, (text, properties, _) in TOOLS.items()
    ]


def answer(method: str, parameters: dict) -> dict[str, object]:
    """Answers one request."""
    if method == "initialize":
        server = {"name": "calculator", "version": "1"}
        version = parameters["protocolVersion"]
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server}
    if method == "tools/list":
        return {"tools": listed()}
    call = TOOLS[parameters["name"]][2]
    text = str(call(**parameters["arguments"]))
    return {"content": [{"type": "text", "text": text}], "isError": False}


if __name__ == "__main__":
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request:
            result = answer(request["method"], request.get("params", {}))
            message = {"jsonrpc": "2.0", "id": request["id"], "result": result}
            print(json.dumps(message), flush=True)
