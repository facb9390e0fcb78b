"""The makers of the pair ``digits``: its target, the ``independent`` draft, and training examples for the other
drafts.
"""
