"""Nautile: the pipeline of the Nautile-370M paper as a Python package.

Each folder of the repository is a package below this one, by a link: `flows/dag.py` is `nautile.flows.dag`.
"""
