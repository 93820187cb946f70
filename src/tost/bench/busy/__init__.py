"""Work beside other busy processes, and on fewer processors than the machine has."""
