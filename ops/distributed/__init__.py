"""Attention over several ranks: placements, collectives, and the merge of states."""
