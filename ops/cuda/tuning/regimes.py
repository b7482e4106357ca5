"""Which provider decodes fastest: written by `python benchmarks/calibrate.py --write` on NVIDIA H200."""

# Rows: 1, 2, 4, ... (sequence, kv head) pairs. Columns: 256, 512, ... keys. T triton, C cudnn, F flash, A fa3.
REGIMES = (
    "TTTTTTTTCC",
    "TTTTTTTCCC",
    "TTTTTTTTTC",
    "TTTTTTTTCC",
    "TTTTTTTCCT",
    "TTTTTTTTTT",
    "CCTTCTTTTT",
    "CCCCCCTTTT",
    "TTCTTTTTTT",
    "TTTTTTTTTT",
    "TCCTTTTTTT",
)
