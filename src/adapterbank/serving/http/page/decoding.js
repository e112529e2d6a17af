// The bytes of a data file as text, as the server reads them: unpacked, and in the encoding that fits. Knows no rows.

const FIRST = 256 * 1024;

// Return a file without its compression, because a request holds plain files.
export async function unpacked(file) {
  if (!/\.gz$/i.test(file?.name ?? "")) return file;
  const plain = file.stream().pipeThrough(new DecompressionStream("gzip"));
  try {
    return new File([await new Response(plain).blob()], file.name.replace(/\.gz$/i, ""));
  } catch {
    throw new Error(`${file.name} cannot be decompressed; compress it again with gzip, or choose the file itself.`);
  }
}

// UTF-16 has a mark, or a zero in half of its bytes; what is not UTF-8 is shown as Windows-1252.
function encodingOf(bytes) {
  const mark = bytes.subarray(0, 2).join(), zeros = [0, 0];
  if (mark === "255,254") return "utf-16le";
  if (mark === "254,255") return "utf-16be";
  bytes.subarray(0, 1000).forEach((byte, k) => { zeros[k % 2] += byte === 0; });
  if (Math.max(...zeros) > Math.min(bytes.length, 1000) / 4) return zeros[0] > zeros[1] ? "utf-16be" : "utf-16le";
  try {
    new TextDecoder("utf-8", { fatal: true }).decode(bytes, { stream: true }); // the last character may be cut
    return "utf-8";
  } catch {
    return "windows-1252";
  }
}

export async function beginning(file) {
  const bytes = new Uint8Array(await file.slice(0, FIRST).arrayBuffer());
  return new TextDecoder(encodingOf(bytes)).decode(bytes, { stream: true });
}
