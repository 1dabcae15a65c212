"""Published data sets: found on the Hub or in a folder, mapped, split and written as our rows."""
