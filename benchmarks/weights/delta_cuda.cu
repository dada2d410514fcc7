// The delta codec on a GPU. Compiled for elements of ITEM bytes, at run time (device_code.py).
//
// A warp works on one chunk of the checksum, 4096 bytes, called a tile: 8 rounds in which each lane has 16 bytes. All 8
// rounds' bytes of a lane lie 512 bytes apart, so a warp reads whole lines. Offsets are 64-bit: parts are of many gigabytes.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#if ITEM == 1
typedef u8 Element;
#elif ITEM == 2
typedef u16 Element;
#else
typedef u32 Element;
#endif

constexpr u32 LANES = 32, WARPS = 8, ROUNDS = 8, ALL = 0xFFFFFFFF;
constexpr u32 TILE_WORDS = 512, TILE = 4096 / ITEM;  // 64-bit words and elements of a tile
constexpr u32 EACH = 16 / ITEM;                      // elements that a lane has in a round
constexpr u32 TILES = 65536 / TILE;                  // tiles of a block

struct Chunk { u64 one, two; };

// The 16 bytes at word `place`, zeros beyond the end.
template <bool WHOLE> __device__ __forceinline__ Chunk load(const u64* words, u64 place, u64 count) {
    if (WHOLE) {
#if ALIGNED
        const ulonglong2 found = __ldg((const ulonglong2*)(words + place));
        return {found.x, found.y};
#else
        return {__ldg(words + place), __ldg(words + place + 1)};
#endif
    }
    return {place < count ? words[place] : 0, place + 1 < count ? words[place + 1] : 0};
}

__device__ __forceinline__ u64 term(u64 word, u64 key) {
    return word + u64(u32(word) + u32(key)) * (u32(word >> 32) + u32(key >> 32));
}

__device__ __forceinline__ u64 factor(u64 chunk) {
    u64 value = (chunk + 1) * 0x9E3779B97F4A7C15ull;
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
    return (value ^ (value >> 31)) | 1;
}

// What 16 bytes at word `place` of the part add to their tile's checksum.
template <bool WHOLE>
__device__ __forceinline__ u64 terms(const Chunk& c, ulonglong2 key, u64 place, u64 count) {
    u64 sum = 0;
    if (WHOLE || place < count) sum += term(c.one, key.x);
    if (WHOLE || place + 1 < count) sum += term(c.two, key.y);
    return sum;
}

__device__ __forceinline__ u64 warp_sum(u64 value) {
    for (u32 step = 16; step; step /= 2) value += __shfl_xor_sync(ALL, value, step);
    return value;
}

// A bit for every element of a word that is not zero.
__device__ __forceinline__ u32 nonzero(u64 word) {
    u32 bits = 0;
#pragma unroll
    for (u32 k = 0; k < EACH / 2; k++) bits |= u32(Element(word >> (8 * ITEM * k)) != 0) << k;
    return bits;
}

__device__ __forceinline__ u32 differing(const Chunk& a, const Chunk& b) {
    return nonzero(a.one ^ b.one) | nonzero(a.two ^ b.two) << (EACH / 2);
}

__device__ __forceinline__ Element element(const Chunk& c, u32 number) {
    const u32 bit = number * ITEM * 8;
    return Element((bit & 64 ? c.two : c.one) >> (bit & 63));
}

// How many of the warp's elements come before this lane's `mine`; `all` is their number.
__device__ __forceinline__ u32 before(u32 mine, u32 some, u32 lane, u32& all) {
    const u32 below = (1u << lane) - 1;
    if (!__any_sync(ALL, mine > 1)) {
        all = __popc(some);
        return __popc(some & below);
    }
    u32 rank = 0;
    all = 0;
#pragma unroll
    for (u32 digit = 0; digit < 5; digit++) {
        const u32 set = __ballot_sync(ALL, (mine >> digit) & 1);
        rank += __popc(set & below) << digit;
        all += __popc(set) << digit;
    }
    return rank;
}

// Where changes go: places in their block, new and old elements.
struct Out { u16* places; Element* ours; Element* theirs; };

// Write this round's changed elements from `from` on, up to `limit`; their number.
__device__ __forceinline__ u32 put(
    const Chunk& a, const Chunk& b, u32 bits, u32 place, const Out& out, u64 from, u64 limit, u32 lane
) {
    const u32 some = __ballot_sync(ALL, bits != 0);
    if (!some) return 0;
    u32 all;
    u64 at = from + before(__popc(bits), some, lane, all);
    while (bits) {
        const u32 number = __ffs(bits) - 1;
        bits &= bits - 1;
        if (at < limit) {
            out.places[at] = u16(place + number);
            out.ours[at] = element(a, number);
            out.theirs[at] = element(b, number);
        }
        at++;
    }
    return all;
}

template <bool WHOLE, bool COMPARE>
__device__ __forceinline__ void read_tile(
    const u64* fresh, const u64* was, const ulonglong2* keys, const Out& slots, i64* counts, u64* sums,
    u64 words, u64 tile, u32 lane
) {
    u64 sum = 0;
    u32 count = 0;
    const u32 in_block = u32(tile % TILES) * TILE + lane * EACH;
#pragma unroll
    for (u32 group = 0; group < ROUNDS; group += AHEAD) {
        Chunk a[AHEAD], b[AHEAD];
#pragma unroll
        for (u32 k = 0; k < AHEAD; k++) {
            const u64 place = tile * TILE_WORDS + (group + k) * 64 + lane * 2;
            a[k] = load<WHOLE>(fresh, place, words);
            if (COMPARE) b[k] = load<WHOLE>(was, place, words);
        }
#pragma unroll
        for (u32 k = 0; k < AHEAD; k++) {
            const u32 round = group + k;
            const u64 place = tile * TILE_WORDS + round * 64 + lane * 2;
            sum += terms<WHOLE>(a[k], keys[round * LANES + lane], place, words);
            if (COMPARE)
                count += put(
                    a[k], b[k], differing(a[k], b[k]), in_block + round * LANES * EACH, slots,
                    tile * SLOTS + count, (tile + 1) * SLOTS, lane
                );
        }
    }
    sum = warp_sum(sum);
    if (lane == 0) {
        sums[tile] = sum * factor(tile);
        if (COMPARE) counts[tile] = count;
    }
}

template <bool COMPARE>
__device__ __forceinline__ void read_all(
    const u64* fresh, const u64* was, const ulonglong2* keys, const Out& slots, i64* counts, u64* sums,
    u64 words
) {
    __shared__ ulonglong2 near_keys[TILE_WORDS / 2];
    near_keys[threadIdx.x] = keys[threadIdx.x];
    __syncthreads();
    const u32 lane = threadIdx.x % LANES;
    const u64 whole = words / TILE_WORDS, tiles = (words + TILE_WORDS - 1) / TILE_WORDS;
    for (u64 tile = blockIdx.x * u64(WARPS) + threadIdx.x / LANES; tile < tiles; tile += gridDim.x * u64(WARPS)) {
        if (tile < whole)
            read_tile<true, COMPARE>(fresh, was, near_keys, slots, counts, sums, words, tile, lane);
        else
            read_tile<false, COMPARE>(fresh, was, near_keys, slots, counts, sums, words, tile, lane);
    }
}

// Both versions once: by tile the new one's checksum, how many elements differ, and the first SLOTS of them.
extern "C" __global__ void __launch_bounds__(256, RESIDENT) compare(
    const u64* fresh, const u64* was, const ulonglong2* keys, u16* places, Element* ours, Element* theirs,
    i64* counts, u64* sums, i64 words
) {
    read_all<true>(fresh, was, keys, Out{places, ours, theirs}, counts, sums, words);
}

// The checksum alone, by tile.
extern "C" __global__ void __launch_bounds__(256, 4) sum_up(const u64* part, const ulonglong2* keys, u64* sums, i64 words) {
    read_all<false>(part, nullptr, keys, Out{}, nullptr, sums, words);
}

// Bring the changes of all tiles together: out of the slots, or read again where those did not hold them or the block is sent whole.
extern "C" __global__ void __launch_bounds__(256) settle(
    const u64* fresh, const u64* was, const bool* dense, const i64* starts,
    const u16* slot_places, const Element* slot_ours, const Element* slot_theirs,
    u16* places, Element* ours, Element* theirs, i64 words
) {
    const u32 lane = threadIdx.x % LANES;
    const u64 tiles = (words + TILE_WORDS - 1) / TILE_WORDS;
    const u64 first = (blockIdx.x * u64(WARPS) + threadIdx.x / LANES) * AT_ONCE;
    const Out out{places, ours, theirs};
    i64 begin[AT_ONCE + 1];
    bool kept[AT_ONCE];
    u16 place[AT_ONCE];
    Element one[AT_ONCE], two[AT_ONCE];
#pragma unroll
    for (u32 k = 0; k <= AT_ONCE; k++) begin[k] = starts[min(first + k, tiles)];
#pragma unroll
    for (u32 k = 0; k < AT_ONCE; k++) {
        const u64 tile = first + k;
        kept[k] = begin[k + 1] - begin[k] <= SLOTS && !(tile < tiles && dense[tile / TILES]);
        if (kept[k] && lane < begin[k + 1] - begin[k]) {
            place[k] = slot_places[tile * SLOTS + lane];
            one[k] = slot_ours[tile * SLOTS + lane];
            two[k] = slot_theirs[tile * SLOTS + lane];
        }
    }
#pragma unroll
    for (u32 k = 0; k < AT_ONCE; k++) {
        const u64 tile = first + k;
        if (kept[k]) {
            if (lane < begin[k + 1] - begin[k]) {
                places[begin[k] + lane] = place[k];
                ours[begin[k] + lane] = one[k];
                theirs[begin[k] + lane] = two[k];
            }
            for (i64 at = lane + LANES; at < begin[k + 1] - begin[k]; at += LANES) {
                places[begin[k] + at] = slot_places[tile * SLOTS + at];
                ours[begin[k] + at] = slot_ours[tile * SLOTS + at];
                theirs[begin[k] + at] = slot_theirs[tile * SLOTS + at];
            }
        } else if (tile < tiles) {
            const bool whole = dense[tile / TILES];
            u64 at = begin[k];
            for (u32 round = 0; round < ROUNDS; round++) {
                const u64 word = tile * TILE_WORDS + round * 64 + lane * 2;
                const Chunk a = load<false>(fresh, word, words), b = load<false>(was, word, words);
                u32 bits = differing(a, b);
                if (whole) {
                    const u32 there = word < words ? min(u64(2), words - word) * (8 / ITEM) : 0;
                    bits = (1u << there) - 1;
                }
                const u32 in_block = u32(tile % TILES) * TILE + (round * LANES + lane) * EACH;
                at += put(a, b, bits, in_block, out, at, ~0ull, lane);
            }
        }
    }
}

// The element that makes `value` of a frame out of the old one.
__device__ __forceinline__ u32 made(u32 old, u32 value) {
    return STEP ? Element(old + ((value >> 1) ^ (0 - (value & 1)))) : value;
}

// A block's new elements into place; with KEEP the old ones are left in `values`.
extern "C" __global__ void __launch_bounds__(1024) write_blocks(
    Element* part, const u16* places, const i64* starts, Element* values
) {
    const u64 block = blockIdx.x;
    const i64 first = starts[block], stop = starts[block + 1];
    Element* const base = part + block * 65536;
    for (i64 at = first + threadIdx.x; at < stop; at += blockDim.x) {
        Element* const target = base + places[at];
        const Element old = STEP || KEEP ? *target : Element(0);
        *target = Element(made(old, values[at]));
        if (KEEP) values[at] = old;
    }
}

// Each line of 64 bytes that `lines` names, read and written as a whole: what memory can do at such places (for the measurement).
extern "C" __global__ void __launch_bounds__(256) touch_lines(uint4* part, const int* lines, i64 count) {
    const u64 at = blockIdx.x * u64(blockDim.x) + threadIdx.x;
    if (at / 4 >= count) return;
    uint4* const place = part + u64(lines[at / 4]) * 4 + at % 4;
    uint4 found = *place;
    found.x ^= 1;
    *place = found;
}
