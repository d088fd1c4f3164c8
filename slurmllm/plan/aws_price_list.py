"""AWS's public price list of EC2, the offer file of AmazonEC2 in JSON.

Its form: "Reading the service price list file for an AWS service", AWS Billing user guide. The file
of one region has some 400 MB, that of all regions several GB: it is read member by member.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from slurmllm.errors import ConfigError
from slurmllm.safe_files import open_regular, reason

_CHUNK = 1 << 20  # characters read at once
_LONGEST = 1 << 24  # characters of one product or of the terms of one product
_YEARS = {"1yr": 1, "3yr": 3}
_HOURS = 8760  # of a year of a contract, as AWS counts effective rates
_DAY = re.compile(r"20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])")
_SPACE = re.compile(r"[\s,:]*")
# Linux without other software, neither on dedicated hosts nor in an unused reservation.
_PRODUCT = {
    "operatingSystem": "Linux", "tenancy": "Shared", "preInstalledSw": "NA",
    "capacitystatus": "Used", "marketoption": "OnDemand", "locationType": "AWS Region",
}  # fmt: skip
_DECODER = json.JSONDecoder()

PriceKey = tuple[str, str, str]  # instance type, region, option


def read_price_list(path: Path) -> tuple[dict[PriceKey, float], str, str]:
    """Prices of Linux nodes, dollars per node hour; their date; their source.

    Reserved prices are effective rates, the lowest of all kinds of payment: the upfront fee divided
    by the hours of the contract is included.

    Raises:
        ConfigError: the file cannot be read, or is no such list in dollars.
    """
    nodes: dict[str, tuple[str, str]] = {}  # SKU → instance type, region
    head: dict[str, Any] = {}
    prices: dict[PriceKey, float] = {}
    try:
        with open_regular(path) as raw:
            stream = _Members(TextIOWrapper(raw, encoding="utf-8"))
            for key in stream.members():
                if key == "products":
                    for sku in stream.members():
                        if found := _node(stream.value()):
                            nodes[sku] = found
                elif key == "terms":
                    if "products" not in head:
                        raise ValueError("its terms come before its products")
                    for kind in stream.members():
                        for sku in stream.members():
                            terms = stream.value()
                            if sku in nodes:
                                _add(prices, nodes[sku], kind, terms)
                else:
                    head[key] = stream.value()
                    continue
                head[key] = None
        code, published = head.get("offerCode"), str(head.get("publicationDate", ""))[:10]
        if code != "AmazonEC2":
            raise ValueError(f"offerCode is {code!r}, not 'AmazonEC2'")
        if not _DAY.fullmatch(published):
            raise ValueError("it has no publicationDate, so its prices have no date")
        if not prices:
            raise ValueError("it has no price of a Linux node")
        return prices, published, f"AWS's price list, {path.name}"
    except OSError as error:
        raise ConfigError(f"--prices {path}: cannot be read: {reason(error)}") from error
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"--prices {path}: not AWS's price list of AmazonEC2 in JSON: {error}; download "
            "offers/v1.0/aws/AmazonEC2/current/REGION/index.json of AWS's price list again"
        ) from error


def _node(product: Mapping[str, Any]) -> tuple[str, str] | None:
    found = product.get("attributes", {})
    others = (found.get(name, value) != value for name, value in _PRODUCT.items())
    instance = str(product.get("productFamily", "")).startswith("Compute Instance")
    if not instance or not found.get("instanceType") or any(others):
        return None
    region = found.get("regionCode") or found.get("location")
    return (found["instanceType"], region) if region else None


def _add(
    prices: dict[PriceKey, float], node: tuple[str, str], kind: str, terms: Mapping[str, Any]
) -> None:
    for term in terms.values():
        years = _YEARS.get(term.get("termAttributes", {}).get("LeaseContractLength"))
        if kind not in ("OnDemand", "Reserved") or (years is None) != (kind == "OnDemand"):
            continue
        usd = 0.0
        for dimension in term["priceDimensions"].values():
            price = dimension["pricePerUnit"]
            if "USD" not in price:
                raise ValueError(f"prices in {', '.join(price)}, not in USD: use a list in dollars")
            amount = float(price["USD"])
            if not 0 <= amount < math.inf:
                raise ValueError(f"{node[0]} costs {price['USD']}: a price is 0 or more")
            usd += amount if dimension["unit"] == "Hrs" else amount / (_HOURS * (years or 1))
        key = (*node, f"{years}y" if years else "on_demand")
        if usd > 0:  # a reservation of capacity is listed with 0
            prices[key] = min(usd, prices.get(key, math.inf))


class _Members:
    """Reads the members of nested JSON objects, of which only one is in memory at a time."""

    def __init__(self, stream: TextIOWrapper) -> None:
        self._stream = stream
        self._text = ""
        self._at = 0
        self._end = False

    def members(self) -> Iterator[str]:
        """Enter the object that follows, and yield its keys; each value must be consumed."""
        self._expect("{")
        while self._peek() != "}":
            key = self.value()
            if not isinstance(key, str):
                raise ValueError(f"{key!r} is no key")
            yield key
        self._expect("}")

    def value(self) -> Any:
        self._peek()
        while True:
            try:
                found, end = _DECODER.raw_decode(self._text, self._at)
                if end < len(self._text) or self._end:  # else a number may go on
                    self._at = end
                    return found
            except json.JSONDecodeError as error:
                # Its position counts from the part in memory.
                fault, rest = error.msg, self._text[error.pos :].strip()
                if self._end:
                    cut = fault.startswith("Unterminated") or not rest
                    raise ValueError("it ends early" if cut else fault) from None
                if len(self._text) - self._at > _LONGEST:
                    raise ValueError(f"{fault}, or a value over {_LONGEST:,} bytes") from None
            self._more()

    def _peek(self) -> str:
        while True:
            space = _SPACE.match(self._text, self._at)
            assert space is not None, "it matches nothing too"
            self._at = space.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if self._end:
                raise ValueError("it ends early")
            self._more()

    def _expect(self, bracket: str) -> None:
        if self._peek() != bracket:
            raise ValueError(f"{self._text[self._at]!r} in place of {bracket!r}")
        self._at += 1

    def _more(self) -> None:
        read = self._stream.read(_CHUNK)
        self._end = not read
        self._text, self._at = self._text[self._at :] + read, 0
