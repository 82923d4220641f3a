// Byte-pair encoding: text to token ids and back. Byte strings are JavaScript strings of code units 0 to 255.

// The pre-tokenizer pattern in JavaScript, which has no possessive quantifiers (the matches are the same) and whose \s
// differs from Unicode's White_Space.
const pieces = (digits) => new RegExp(
  String.raw`'(?:[sdmtSDMT\u017f]|[lL]{2}|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,${digits}}` +
    String.raw`| ?[^\p{White_Space}\p{L}\p{N}]+[\r\n]*|\p{White_Space}+$|\p{White_Space}*[\r\n]` +
    String.raw`|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}`,
  "gu",
);

export class Tokenizer {
  // tokens: the bytes of each token in base64, in order of rank. Lower ranks merge first. digits: of a number in a piece.
  constructor(tokens, digits = 3) {
    this.pieces = pieces(digits);
    this.bytes = tokens.map(atob);
    this.ranks = new Map(this.bytes.map((token, rank) => [token, rank]));
  }

  encode(text) {
    const encoder = new TextEncoder();
    const ids = [];
    for (const [piece] of text.matchAll(this.pieces)) {
      let parts = Array.from(encoder.encode(piece), (byte) => String.fromCharCode(byte));
      // Merge the adjacent pair of the lowest rank until no pair is a token.
      for (;;) {
        let best = Infinity;
        let position = -1;
        for (let index = 0; index + 1 < parts.length; index++) {
          const rank = this.ranks.get(parts[index] + parts[index + 1]);
          if (rank !== undefined && rank < best) [best, position] = [rank, index];
        }
        if (position < 0) break;
        parts.splice(position, 2, parts[position] + parts[position + 1]);
      }
      ids.push(...parts.map((part) => this.ranks.get(part)));
    }
    return ids;
  }

  // The text that an id adds to the stream of a TextDecoder. Special tokens, which have no rank, add none.
  decode(id, decoder) {
    const bytes = Uint8Array.from(this.bytes[id] ?? "", (unit) => unit.charCodeAt(0));
    return decoder.decode(bytes, { stream: true });
  }
}
