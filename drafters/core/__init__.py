"""What methods share. A method's file imports these names from here."""

from vlmdistill.drafters.core.batch import Batch, Entries, Head
from vlmdistill.drafters.core.drafter import Drafter
from vlmdistill.drafters.core.eagle_drafter import EagleDrafter, GuessTable
from vlmdistill.drafters.core.kv_cache import KVCache
from vlmdistill.drafters.core.layers import RMSNorm
from vlmdistill.drafters.core.serving import Visual
from vlmdistill.drafters.core.tree import Tree

__all__ = [
    "Batch",
    "Drafter",
    "EagleDrafter",
    "Entries",
    "GuessTable",
    "Head",
    "KVCache",
    "RMSNorm",
    "Tree",
    "Visual",
]
