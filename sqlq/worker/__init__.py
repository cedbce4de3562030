"""STAGES 2 to 4: claim, execute, settle; and the leases that make it safe."""
