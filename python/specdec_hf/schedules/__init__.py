"""How many tokens the next round drafts (draft_length.py), and whether it drafts at all
(benefit_guard.py).
"""
