"""Asks through the gateway as a product does, and reports what the user made of the answer.

Usage: ``python ask.py STATE_FOLDER [QUESTION]``, with the folder that ``start.sh`` wrote.
"""

import sys
from pathlib import Path

import openai

from deltawire.live.feedback.client import FeedbackClient, receipt_of

state = Path(sys.argv[1])
question = sys.argv[2] if len(sys.argv) > 2 else "How do I change my password?"
url, token = (state / "url").read_text(), (state / "token").read_text()

client = openai.OpenAI(base_url=f"{url}/v1", api_key=token)
answer = client.chat.completions.create(
    model="support",
    messages=[{"role": "user", "content": question}],
    user="ada@example.com",  # stored as a keyed pseudonym
    extra_headers={"x-deltawire-capture": "true"},  # only where this user has agreed
)
print(answer.choices[0].message.content)
FeedbackClient(url, token).send(receipt_of(answer), "thumbs", "up")
