"""Scenario `hostile`: what bounded attacks cost a cluster, and an honest client meanwhile."""
