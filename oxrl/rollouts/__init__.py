"""Prompts to scored rollouts: environments, collection, filters, and the replay buffer."""
