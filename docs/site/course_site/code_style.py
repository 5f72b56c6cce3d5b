"""The colours of code, for light and for dark. Introduced in phase 3.

Few colours, so that the eye stays with the text: keywords, strings, comments, numbers, and the names that a line
defines. Invariant: every colour has a contrast of at least 4.5 with the block and with the shades of added and removed
lines in `static/course.css`.
"""

from typing import ClassVar

from pygments.style import Style
from pygments.token import Comment, Error, Generic, Keyword, Name, Number, Operator, String, Token


class Light(Style):
    name = "course-light"
    background_color = "#f6f5f0"
    styles: ClassVar = {
        Token: "#24292f",
        Comment: "italic #5d646d",
        Keyword: "#a0245c",
        Keyword.Constant: "#8a4a00",
        Operator.Word: "#a0245c",
        Name.Function: "bold #0a5a8c",
        Name.Class: "bold #0a5a8c",
        Name.Decorator: "#6b4a9e",
        Name.Tag: "#0a5a8c",
        String: "#1e6432",
        String.Doc: "#4d5a4f",
        String.Interpol: "#8a4a00",
        Number: "#8a4a00",
        Generic.Prompt: "bold #0b6a63",
        Generic.Output: "#4b525b",
        Error: "",
    }


class Dark(Style):
    name = "course-dark"
    background_color = "#1b2026"
    styles: ClassVar = {
        Token: "#d8dee6",
        Comment: "italic #98a3b0",
        Keyword: "#f0a0c4",
        Keyword.Constant: "#eebb82",
        Operator.Word: "#f0a0c4",
        Name.Function: "bold #8cc8f2",
        Name.Class: "bold #8cc8f2",
        Name.Decorator: "#c8b0f0",
        Name.Tag: "#8cc8f2",
        String: "#9bd6a6",
        String.Doc: "#a9b8ab",
        String.Interpol: "#eebb82",
        Number: "#eebb82",
        Generic.Prompt: "bold #6fd0c5",
        Generic.Output: "#b0bac6",
        Error: "",
    }
