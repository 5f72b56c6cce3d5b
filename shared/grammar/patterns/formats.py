"""The supported formats of JSON Schema, as patterns of the whole string. Introduced in phase 12.

Any other format is an annotation, as the standard says.
"""

_OCTET = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(\.{_OCTET}){{3}}"
_YEAR = r"([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|([2468][048]|0[48]|[13579][26])00)"
_DAY = r"((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_DATE = rf"({_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?([Zz]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_DAYS = r"[0-9]+D|[0-9]+M([0-9]+D)?|[0-9]+Y([0-9]+M([0-9]+D)?)?"
_SECONDS = r"[0-9]+S|[0-9]+M([0-9]+S)?|[0-9]+H([0-9]+M([0-9]+S)?)?"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HEX4 = r"[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    [
        rf"({_HEX4}:){{7}}{_HEX4}",
        rf"({_HEX4}:){{1,7}}:",
        *(rf"({_HEX4}:){{1,{7 - count}}}(:{_HEX4}){{1,{count}}}" for count in range(1, 7)),
        rf":((:{_HEX4}){{1,7}}|:)",
    ]
)
_IPV6_AND_IPV4 = "|".join(  # the last 32 bits as an IPv4 address
    [
        rf"({_HEX4}:){{6}}{_IPV4}",
        rf"({_HEX4}:){{1,5}}:{_IPV4}",
        *(rf"({_HEX4}:){{1,{5 - count}}}(:{_HEX4}){{1,{count}}}:{_IPV4}" for count in range(1, 5)),
        rf":(:{_HEX4}){{0,5}}:{_IPV4}",
    ]
)
_BEYOND_ASCII = r"\u{A0}-\u{D7FF}\u{F900}-\u{FDCF}\u{FDF0}-\u{FFEF}\u{10000}-\u{DFFFD}"


def _references(more: str = "") -> tuple[str, str]:
    """URIs, and URIs or references relative to one (RFC 3986); with ``more`` characters IRIs (RFC 3987)."""
    plain = rf"[A-Za-z0-9._~!$&'()*+,;={more}-]|%[0-9A-Fa-f]{{2}}"
    authority = rf"(({plain}|:)*@)?(({plain})*|\[({_IPV6})\])(:[0-9]*)?"
    segment = rf"({plain}|[:@])"
    from_root = rf"//{authority}(/{segment}*)*|/({segment}+(/{segment}*)*)?"
    rest = rf"(\?({segment}|[/?])*)?(#({segment}|[/?])*)?"
    path = rf"({from_root}|{segment}+(/{segment}*)*)?"
    relative = rf"({from_root}|({plain}|@)+(/{segment}*)*)?"
    scheme = "[A-Za-z][A-Za-z0-9+.-]*:"
    return rf"{scheme}{path}{rest}", rf"({scheme}{path}|{relative}){rest}"


_URI, _URI_REFERENCE = _references()
_IRI, _IRI_REFERENCE = _references(_BEYOND_ASCII)

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}[Tt]{_TIME}",
    "duration": rf"P([0-9]+W|({_DAYS})(T({_SECONDS}))?|T({_SECONDS}))",
    "uuid": r"[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}",
    "ipv4": _IPV4,
    "ipv6": f"{_IPV6}|{_IPV6_AND_IPV4}",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "email": rf"[A-Za-z0-9!#$%&'*+/=?^_`{{|}}~-]+(\.[A-Za-z0-9!#$%&'*+/=?^_`{{|}}~-]+)*@{_LABEL}(\.{_LABEL})*",
    "uri": _URI,
    "uri-reference": _URI_REFERENCE,
    "iri": _IRI,
    "iri-reference": _IRI_REFERENCE,
    "json-pointer": r"(/([^~/]|~[01])*)*",
    "relative-json-pointer": r"(0|[1-9][0-9]*)(#|(/([^~/]|~[01])*)*)",
}
