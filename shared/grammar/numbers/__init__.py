"""JSON numbers by value, digit by digit."""
