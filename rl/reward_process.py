"""The process that runs a reward: `python -m nautile.rl.reward_process NAME DESCRIPTOR`.

It reads a line of JSON for each call from the socket DESCRIPTOR, a list of problems with completions, and answers with
a line: their rewards, or an error. What the reward prints goes to the log of the stage.
"""

import json
import math
import socket
import sys
from typing import Any

from nautile.common.errors import ConfigError, Retryable
from nautile.common.text import first_line
from nautile.data.sources.reasoning_gym import Problem
from nautile.rl.rewards import Reward, SampledReply, reward_named

LONGEST_MESSAGE = 500  # characters


def main(name: str, descriptor: int) -> None:
    """Serve calls until the other end closes."""
    with socket.socket(fileno=descriptor) as connection:
        connection.set_inheritable(False)  # else what the reward starts would hold it open after this process
        with connection.makefile("rwb") as stream:

            def send(answer: dict[str, Any]) -> None:
                stream.write(json.dumps(answer).encode() + b"\n")
                stream.flush()

            try:
                reward = reward_named(name)
            except ConfigError as error:
                send({"fault": str(error)})
                return
            send({})
            for line in stream:
                send(answer(reward, json.loads(line)))


def answer(reward: Reward, items: list[dict[str, Any]]) -> dict[str, Any]:
    """The rewards of the completions, or the error, as JSON data."""
    problems = [Problem(**{**item["problem"], "options": tuple(item["problem"]["options"])}) for item in items]
    replies = [SampledReply(**item["reply"]) for item in items]
    try:
        if reward.batch is None:
            values = [reward.score(problem, reply) for problem, reply in zip(problems, replies, strict=True)]
        else:
            values = list(reward.score(problems, replies))
        if len(values) != len(items):
            return {"error": "no_number", "message": f"{len(values)} rewards of {len(items)} completions"}
        rewards = [None if value is None else float(value) for value in values]
        if wrong := [value for value in rewards if value is not None and not math.isfinite(value)]:
            return {"error": "no_number", "message": f"it is {wrong[0]}"}
        return {"rewards": rewards}
    except (ConfigError, Retryable) as error:
        return {"error": type(error).__name__, "message": str(error)[:LONGEST_MESSAGE]}
    except (Exception, SystemExit) as error:  # the code of a plug-in may raise anything
        return {"error": "raised", "message": f"{type(error).__name__}: {first_line(error)[:LONGEST_MESSAGE]}"}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
