"""Prompts to scored answers: environments, collection, filters, and what waits to be trained on."""
