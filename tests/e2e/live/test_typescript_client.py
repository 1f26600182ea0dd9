"""The client for TypeScript, run by Node against a gateway."""

import asyncio
import json
import shutil

import pytest
from documents import ROOT
from live_gateway import TOKEN, live_serving, published

pytestmark = pytest.mark.drills
CLIENT = ROOT / "clients" / "typescript" / "feedback.mjs"
PROGRAM = """
import { FeedbackClient, RefusedError, UnreachableError, receiptOf } from %(client)s;
const [url, token] = process.argv.slice(1);
const said = [];
const headers = { Authorization: `Bearer ${token}`, "x-deltawire-capture": "true" };
const ask = (body) => fetch(`${url}/v1/chat/completions`, { method: "POST", headers,
  body: JSON.stringify({ model: "m", messages: [{ role: "user", content: "Hi" }], ...body }) });
const client = new FeedbackClient(`${url}/`, token, { attempts: 2 });
const nobody = new FeedbackClient("http://127.0.0.1:9", token, { attempts: 1 });
const whole = await (await ask({})).json();
said.push(await client.send(receiptOf(whole), "thumbs", "up", { id: "click-1" }));
said.push(await client.send(receiptOf(whole), "thumbs", "up", { id: "click-1" }));
const stream = await ask({ stream: true });
const name = stream.headers.get("x-deltawire-answer");
await stream.text();
const [receipt] = await client.receipts(name);
said.push((await client.send(receipt, "edit", 1, { text: "Better." })).slice(0, 3));
for (const [kind, attempt] of [
  ["wrong receipt", () => client.send("dw2.x", "thumbs", "up")],
  ["other content", () => client.send(receiptOf(whole), "thumbs", "down", { id: "click-1" })],
  ["unknown answer", () => client.receipts("../state")],
  ["wrong token", () => new FeedbackClient(url, "x").send("dw2.x", "accept")],
  ["nobody listens", () => nobody.send("r", "accept")],
  ["no URL", () => new FeedbackClient("file:///etc", token)],
]) {
  try { await attempt(); said.push([kind, "none"]); }
  catch (error) { said.push([kind, error.name, error.status ?? null, error.code ?? null]); }
}
console.log(JSON.stringify(said));
"""


def test_reports_arrive_once_and_refusals_are_told(tmp_path, monkeypatch):
    if (node := shutil.which("node")) is None:
        pytest.skip("Node is missing")
    program = PROGRAM % {"client": json.dumps(CLIENT.as_uri())}

    async def scenario():
        async with live_serving(published(), tmp_path / "state", monkeypatch) as at:
            process = await asyncio.create_subprocess_exec(
                node, "--input-type=module", "-e", program, at.url(""), TOKEN,
                stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            async with asyncio.timeout(60):
                out, _ = await process.communicate()
            _, reports = await at.uploaded()
            return json.loads(out), [one for one in reports if one.source == "client"]

    said, reports = asyncio.run(scenario())
    assert said == [
        "click-1", "click-1", "ts-",
        ["wrong receipt", "RefusedError", 404, "not_found"],
        ["other content", "RefusedError", 409, "conflict"],
        ["unknown answer", "RefusedError", 404, "not_found"],
        ["wrong token", "RefusedError", 401, "invalid_api_key"],
        ["nobody listens", "UnreachableError", None, None],
        ["no URL", "TypeError", None, None],
    ]  # fmt: skip
    assert [(one.kind, one.text) for one in reports] == [("thumbs", ""), ("edit", "Better.")]
