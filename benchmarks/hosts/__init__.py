"""Programs that people already run, over this library and over what they have themselves: needs them and a GPU."""
