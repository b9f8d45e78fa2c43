"""What a trained model is good for: bits per byte of text it never saw, and film reviews told apart
by its features, frozen and fine-tuned; what simpler methods reach beside it."""

from .answers import Questions, evaluate
from .table import table

__all__ = ["Questions", "evaluate", "table"]
