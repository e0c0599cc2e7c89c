"""The main job: run both ops at and around 65,536 tokens and compare what they write.

On a GPU every returned element and every cache byte is compared with the plain PyTorch reference.
On any device (on a CPU the op *is* the reference) a sample of rows, the first and the last among
them, is compared with float64 (``exact.py``), and all rows are checked for what is exact: the
top-k fill, bytes that belong to no live slot, and that each live slot was written.
"""

from dsv32_ops.verify.job import TOKENS, Job, Result
from dsv32_ops.verify.run import verify

__all__ = ["TOKENS", "Job", "Result", "verify"]
