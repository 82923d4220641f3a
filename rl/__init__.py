"""Reinforcement (paper §4): one rollout engine, one learner, three small variants."""
