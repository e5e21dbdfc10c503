"""Rewrites: a model or graph in, the same model or graph with sketched layers out.

The folder stands at the root of the repository, but its one name is ``panther_compile.passes``:
imported as ``passes`` it would be a second copy, with second classes.
"""

if __name__ != "panther_compile.passes":
    raise ImportError(f"this folder is panther_compile.passes, not {__name__!r}: import it by that name")
