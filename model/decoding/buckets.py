"""Length buckets: the few padded lengths that programs are compiled for, instead of one program for every length."""


def length_buckets(longest: int, shortest: int = 64) -> list[int]:
    """`shortest`, twice that, four times, … below `longest`, and `longest` itself."""
    lengths = []
    length = shortest
    while length < longest:
        lengths.append(length)
        length *= 2
    return [*lengths, longest]
