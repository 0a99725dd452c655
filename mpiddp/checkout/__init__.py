"""What a checkout has beside the package: benchmarks and job scripts, in an installation as well.

``benchmarks`` and ``jobs`` in this folder are links. A wheel holds what they lead to, so that
both are found in the same way, and no other top-level package is installed.
"""
