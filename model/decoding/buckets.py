"""Length buckets: the few padded lengths to compile programs for, instead of one program per length."""


def length_buckets(longest: int, shortest: int = 64) -> list[int]:
    """Bucket lengths: `shortest` and its doublings below `longest`, then `longest` itself."""
    lengths = []
    length = shortest
    while length < longest:
        lengths.append(length)
        length *= 2
    return [*lengths, longest]
