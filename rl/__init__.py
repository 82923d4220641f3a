"""Reinforcement learning (paper §4): the stages align, reason and self_distill, on one rollout engine."""
