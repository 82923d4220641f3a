"""The endpoint kind "checker": a program that grades arithmetic in place of an LLM judge, with the judge's protocol.

This module has only its name and command line. The program itself (`rl.checker`) uses the graders of `evals`,
which this package may not import.
"""

from nautile.data.endpoints.own_server import ServerProgram

# The version number of its rules (`rl.checker`). A change of rules needs a new one, or cached replies are stale.
MODEL = "arithmetic-checker-1"
STAND_IN = f"{MODEL} (it checks arithmetic, the answer and its form, and reads nothing else), in place of an LLM judge"
PROGRAM = ServerProgram(MODEL, lambda: ["nautile.rl.checker"], replicated=False, stand_in=STAND_IN)
