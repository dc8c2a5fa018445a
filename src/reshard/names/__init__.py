"""Names: what a checkpoint holds, spelled as another code spells it.

Theory. Leaving one framework for another changes no number: parameters get other names, and some
are joined, split, stacked or transposed. :mod:`.rules` reads which name of one side is which of the
other, :mod:`.solving` makes joins of them for the tensors at hand, and :mod:`.translation` returns
the same checkpoint under the other names, every state and setting with it.
"""
