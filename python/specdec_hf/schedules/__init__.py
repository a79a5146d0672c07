"""How many tokens a round drafts: schedules by name (registry.py), their contract (base.py), and
the benefit guard on top of all of them (benefit_guard.py).
"""
