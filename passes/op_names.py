"""Names of PyTorch ops that several passes read: functions and methods of one name count as one op.

The ops in a set may do what its name says, or more. Each pass proves from shapes, dtypes and arguments that a call does
no more.
"""

from __future__ import annotations

CASTS = {"to", "type", "type_as", "float", "double", "half", "bfloat16", "_to_copy"}
COPIES = {"contiguous", "clone", "alias"}
STRETCHES = {"expand", "broadcast_to", "repeat", "tile", "expand_as"}
RESHAPES = {"reshape", "view", "flatten", "unflatten", "reshape_as", "view_as", "_unsafe_view", "unsqueeze", "squeeze"}
SWAPS = {"transpose", "swapaxes", "swapdims"}
REORDERS = SWAPS | {"permute"}
CATS = {"cat", "concat", "concatenate"}
MULTIPLIES = {"mul", "multiply"}
INVERTS = {"invert", "logical_not", "bitwise_not"}
MATMULS = {"matmul", "__matmul__", "bmm"}
