// Text to ids and back: byte-pair encoding with ranks in the order of their merges. Bytes are strings of code units 0-255.

// The project's pattern for JavaScript: its possessive quantifiers match the same, and \s is Unicode's white space.
const PIECES = new RegExp(
  String.raw`'(?:[sdmtSDMT\u017f]|[lL]{2}|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}` +
    String.raw`| ?[^\p{White_Space}\p{L}\p{N}]+[\r\n]*|\p{White_Space}+$|\p{White_Space}*[\r\n]` +
    String.raw`|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}`,
  "gu",
);

export class Tokenizer {
  // tokens: the bytes of each rank in base64, in order.
  constructor(tokens) {
    this.bytes = tokens.map(atob);
    this.ranks = new Map(this.bytes.map((token, rank) => [token, rank]));
  }

  encode(text) {
    const encoder = new TextEncoder();
    const ids = [];
    for (const [piece] of text.matchAll(PIECES)) {
      let parts = Array.from(encoder.encode(piece), (byte) => String.fromCharCode(byte));
      for (;;) {
        let best = Infinity;
        let place = -1;
        for (let index = 0; index + 1 < parts.length; index++) {
          const rank = this.ranks.get(parts[index] + parts[index + 1]);
          if (rank !== undefined && rank < best) [best, place] = [rank, index];
        }
        if (place < 0) break;
        parts.splice(place, 2, parts[place] + parts[place + 1]);
      }
      ids.push(...parts.map((part) => this.ranks.get(part)));
    }
    return ids;
  }

  // The text that an id adds to a stream of one TextDecoder; markers, which are no ranks, add none.
  decode(id, decoder) {
    const bytes = Uint8Array.from(this.bytes[id] ?? "", (unit) => unit.charCodeAt(0));
    return decoder.decode(bytes, { stream: true });
  }
}
