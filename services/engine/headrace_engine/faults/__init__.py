"""Faults provoked by a plan, for tests of what surrounds the engine; without a plan nothing of it acts."""
