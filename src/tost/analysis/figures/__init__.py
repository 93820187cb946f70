"""Pictures of the results. Colours stay distinct for colour-blind readers; marks and labels repeat them."""
