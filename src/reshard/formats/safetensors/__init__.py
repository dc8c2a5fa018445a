"""Safetensors sets: weights to be served, whole tensors under their names.

Theory. A set is one file, or several with an index that says which tensor is in which. Each file is
a header (JSON: name -> element type, shape, byte range) and the tensors, row-major, one after the
other without a hole. It holds no optimizer, no scalar and no topology, so a set is an *export*:
what of a checkpoint is used when training is over. The format, byte for byte, is that of the
``safetensors`` library, and of transformers for shards and index; both judge the tests.
"""

from reshard.formats.safetensors.options import SafetensorsOptions, Tied, dtype_rules

__all__ = ["SafetensorsOptions", "Tied", "dtype_rules"]
