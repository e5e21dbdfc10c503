"""The arithmetic of the layers, in torch and Triton alone. Imports nothing, so Triton stays out.

The folder stands at the root of the repository, but its one name is ``panther_compile.kernels``: as
``kernels`` it would be a second copy. It cannot refuse that name outright, because transformers imports
whatever `kernels` it finds to learn its version; it makes itself an empty module without a file
instead, which transformers takes for absent.
"""

if __name__ != "panther_compile.kernels":
    __path__ = []
    __file__ = None  # type: ignore[assignment]
