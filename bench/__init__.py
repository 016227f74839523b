"""The demo and the benchmarks. Every file here that has a ``main`` is also a script."""
