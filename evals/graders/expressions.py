r"""Compare single mathematical values with SymPy, in a process of its own (`-m nautile.evals.graders.expressions PID`).

One JSON request {question, a, b} per input line, one reply per output line: true, false, or null if SymPy failed. The
process ends with process PID. It has no limit of time, because SymPy can loop where no Python code can interrupt it:
whoever asks kills the process instead.

Values are compared exactly: by simplifying their difference, after numbers at a few points have shown no difference.
"""

import json
import os
import re
import sys
from fractions import Fraction
from functools import lru_cache
from typing import Any

from nautile.common.processes import bounded_memory, die_with_parent
from nautile.evals.graders.notation import WrittenNumber, same_number, stands_for, written_number

MEMORY = 3 << 30  # bytes of address space beyond what the libraries use
DIGITS = 30
_DEGREES = re.compile(r"([0-9]+(?:\.[0-9]+)?|\\[a-z]+ ?|[A-Za-z])\s*\^\s*\\circ")
# Primes, and exponents that the parser takes for a transposition: it drops both.
_DROPPED = re.compile(r"'|\\prime(?![A-Za-z])|\^\s*\{?\s*(?:T(?![A-Za-z])|\\(?:top|intercal|dagger)(?![A-Za-z]))")
# Points at which expressions in variables are compared first, of both signs, and none a likely special case.
_POINTS = ("17/13", "-29/31", "37/41", "-43/19", "53/7", "-3/59")


@lru_cache(maxsize=512)
def read(text: str) -> Any:
    """The SymPy expression or matrix of a tidy LaTeX `text`, with exact numbers; None if it is none."""
    import sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

    try:
        # Letters keep their case. Degrees are only left here as arguments, in radians: the parser drops them.
        value = latex2sympy(
            _DEGREES.sub(r"(\1*\\pi /180)", text), is_real=True, normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )  # fmt: skip
    except Exception:  # the parser raises its own and many others on a text that it cannot read
        return None
    if not isinstance(value, sympy.Expr | sympy.MatrixBase):
        return None
    exact: dict[Any, Any] = {number: sympy.Rational(str(number)) for number in value.atoms(sympy.Float)}
    bound = {symbol for sum_ in value.atoms(sympy.Sum, sympy.Product) for symbol in sum_.bound_symbols}
    for symbol in value.atoms(sympy.Symbol):
        if symbol.name == "i" and symbol not in bound:
            exact[symbol] = sympy.I
    return value.xreplace(exact) if exact else value


def same(a: str, b: str) -> bool:
    """Whether two texts are the same value."""
    import sympy

    first, second = read(a), read(b)
    if first is None or second is None or len(_DROPPED.findall(a)) != len(_DROPPED.findall(b)):
        return False
    # Sums and products of matrices become matrices.
    first, second = (value.doit() if isinstance(value, sympy.MatrixExpr) else value for value in (first, second))
    if isinstance(first, sympy.MatrixBase) or isinstance(second, sympy.MatrixBase):
        if not (isinstance(first, sympy.MatrixBase) and isinstance(second, sympy.MatrixBase)):
            return False
        return first.shape == second.shape and all(map(_same, first.flat(), second.flat()))
    first, second = first.doit(), second.doit()
    for text, value in ((a, second), (b, first)):
        decimal = written_number(text)
        if decimal is not None and value.is_Rational:
            return same_number(decimal, WrittenNumber(Fraction(int(value.p), int(value.q))))
        if decimal is not None and decimal.places is not None and value.is_number:
            nearest = value.evalf(DIGITS)
            return bool(nearest.is_Float) and stands_for(decimal, Fraction(str(nearest)))
    return _same(first, second)


def multiple(a: str, b: str, positive: bool) -> bool:
    """Whether one value is the other times a number, a positive one if `positive`; neither being zero."""
    import sympy

    first, second = read(a), read(b)
    if not isinstance(first, sympy.Expr) or not isinstance(second, sympy.Expr):
        return False
    first, second = sympy.expand(first.doit()), sympy.expand(second.doit())
    if first == 0 or second == 0:
        return first == second
    ratio = sympy.simplify(first / second)
    return bool(ratio.is_number and ratio.is_finite and ratio != 0 and (ratio.is_positive or not positive))


def _same(a: Any, b: Any) -> bool:
    import sympy

    if a == b:
        return not a.has(sympy.nan, sympy.zoo)
    if not isinstance(a, sympy.Expr) or not isinstance(b, sympy.Expr):
        return False
    infinite = (sympy.oo, -sympy.oo, sympy.zoo, sympy.nan)
    if a in infinite or b in infinite or (a.is_Rational and b.is_Rational):
        return False  # not equal as they stand
    difference = a - b
    symbols = sorted(difference.free_symbols, key=str)
    checked = 0
    if not difference.has(sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative) or not symbols:
        for start in range(4 if symbols else 1):
            point = {
                symbol: sympy.Rational(_POINTS[(start + 5 * index) % len(_POINTS)]) + index // len(_POINTS)
                for index, symbol in enumerate(symbols)
            }
            zero = _is_zero_number(difference.subs(point))
            if zero is False:
                return False
            checked += zero is True
    simple = sympy.simplify(difference)
    if simple.is_zero is not None:
        return bool(simple.is_zero)
    # No proof either way: equal to a hundred digits at every point, or not known to be equal.
    return checked > 0 and not simple.has(sympy.nan, sympy.zoo)


def _is_zero_number(value: Any) -> bool | None:
    """Whether a number is zero as far as up to a hundred digits show; None if it has no value."""
    import sympy

    number = value.evalf(15)
    if not number.is_number or number.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo):
        return None
    parts = number.as_real_imag()
    if not all(part.is_Float or part.is_Integer or part.is_Rational for part in parts):
        return None
    # A difference that evaluation could not tell from zero has a precision of one bit.
    return not any(part != 0 and (not part.is_Float or part._prec > 1) for part in parts)


def _reply(request: dict[str, str]) -> bool | None:
    import sympy.core.random

    question, a, b = request["question"], request["a"], request["b"]
    sympy.core.random.seed(0)  # simplification tries random numbers
    try:
        if question == "reads":
            return read(a) is not None
        if question == "same":
            return same(a, b)
        return multiple(a, b, question == "positive multiple")
    except Exception:  # SymPy raises many errors; none is a verdict
        return None


def _serve() -> None:
    """Main loop of the process: reply to requests until the input ends."""
    # A private copy of standard output, before everything else is turned away from it.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    # Libraries that print must not write between the replies.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    die_with_parent(int(sys.argv[1]))
    same("x+1", "1+x")  # loads SymPy and the parser's tables
    with bounded_memory(MEMORY):
        replies.write("ready\n")
        for line in sys.stdin:
            replies.write(json.dumps(_reply(json.loads(line))) + "\n")


if __name__ == "__main__":
    _serve()
