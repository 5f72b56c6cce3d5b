"""From shapes to rules of an automaton: values, objects, arrays and strings of JSON."""
