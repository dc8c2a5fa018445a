"""Random maps, held against dense index arrays: ``make fuzz-geometry``.

=========  =========================================================================================
`dense`    what a map says, one element after the other: the oracle, plain Python and NumPy
`drawing`  random cuts of small tensors, and random spellings of a cut in pieces
`laws`     what is asked of reshard, and what the oracle says to it: alone here reshard is imported
=========  =========================================================================================
"""
