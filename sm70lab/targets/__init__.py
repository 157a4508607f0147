"""Targets: each turns (workload, route) into generations."""
