"""The checker: a program that marks arithmetic in place of an LLM judge, behind the protocol of the judge.

Only its name and how it is started are here: it grades as the evaluations do, which this package may not import.
"""

from data.endpoints.own_server import ServerProgram

# The number is that of its rules (`rl.checker.marks`): with others, replies in the cache would be out of date.
MODEL = "arithmetic-checker-1"
STAND_IN = f"{MODEL} (it checks arithmetic, the answer and its form, and reads nothing else), in place of an LLM judge"
PROGRAM = ServerProgram(MODEL, lambda: ["rl.checker.server"], replicated=False)
