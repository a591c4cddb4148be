"""An agent of the openai SDK: it has the tools of the world, and prints what the model says at last."""

import json
import os
import sys
import urllib.request

from openai import OpenAI

client = OpenAI()
address = os.environ["SWARM_TOOLS_URL"]
STREAM = "--stream" in sys.argv


def fetched(url: str, body: object = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data=data)) as response:
        return json.load(response)


def said(messages: list, tools: list):
    options = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": tools}
    if not STREAM:
        return client.chat.completions.create(**options).choices[0].message
    with client.chat.completions.stream(**options) as stream:
        return stream.get_final_completion().choices[0].message


messages: list = [
    {"role": "system", "content": os.environ["SWARM_SYSTEM"]},
    {"role": "user", "content": sys.stdin.read()},
]
tools = fetched(address)["tools"]
while (message := said(messages, tools)).tool_calls:
    messages.append(message.model_dump(exclude={"parsed"} if STREAM else None))
    for call in message.tool_calls:
        result = fetched(f"{address}/{call.function.name}", json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result["content"]})
print(message.content)
