"""Scenario `chaos`: a two-region cluster under load while its servers, databases, line and disks fail, and a judge."""
