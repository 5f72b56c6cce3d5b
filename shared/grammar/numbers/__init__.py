"""Numbers of JSON by their value, digit by digit."""
