"""What is kept out of the training text: copies of what is there already."""

from configs.section import Section


class DeduplicateConfig(Section):
    """Copies within and across sources; exact ones never stay (case, Unicode form and white space do not count).

    `near`: also documents that share a band of MinHash values (`data.minhash`). Off by default: FineWeb-Edu's makers
    did it, and it costs a seventh of the time of tokenising and 112 bytes a document on disk. `across`: what a source
    earlier in the list has is dropped from the later ones.
    """

    near: bool = False
    across: bool = True
