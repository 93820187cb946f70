"""Generator of Pathfinder images."""
