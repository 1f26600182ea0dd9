"""An environment made with verifiers: doubles of numbers, asked for in two turns by a harness that
runs in its own process. An environment as a user of verifiers would write it, without deltawire.
"""

import openai
import verifiers.v1 as vf

__all__ = ["DoublingHarness", "DoublingTaskset"]


class DoublingData(vf.TaskData):
    answer: str = ""


class DoublingTask(vf.Task[DoublingData, vf.State]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)


class DoublingTaskset(vf.Taskset[DoublingTask, vf.TasksetConfig]):
    def load(self):
        for number in range(6):
            yield DoublingTask(DoublingData(prompt=f"double {number}", answer=str(2 * number)))


class DoublingHarness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
        _, prompt = self.resolve_text_prompt(data)
        messages = [{"role": "user", "content": prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                said = {"role": "assistant", "content": answer.choices[0].message.content}
                messages += [said, {"role": "user", "content": "sure?"}]
        return vf.ProgramResult(0, "", "")
