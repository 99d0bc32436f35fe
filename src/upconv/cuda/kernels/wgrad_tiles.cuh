// A chunk in the shared memory of wgrad_wgmma.cu, as wgrad_boxes.py counts it: how x and g lie, stages, sums, steps of K.

// x in shared memory. Rows of a channel's pixels (K-major): for each SEGMENT bytes of a row a box of [row][channel][SEGMENT].
// CHANNELS_LAST of 16 bits: for each X_WIDTH channels a box of the chunk's pixels, or (X_ONE_BOX) one box that brings them in that order.
#define PIXELS (X_ROWS * TILE_W)
#if !K_MAJOR
#define X_WIDTH (BLOCK_CI % 64 == 0 ? 64 : BLOCK_CI % 32 == 0 ? 32 : 16)  // of a swizzled line
#define SEGMENT (X_WIDTH * ELEMENT)
#define BOXES (BLOCK_CI / X_WIDTH)
#define BOX_BYTES (PIXELS * SEGMENT)
#define X_ROW_BYTES (TILE_W * SEGMENT)     // from one row of the tile to the next
#define STEP_BYTES (16 * SEGMENT)          // and from one step of K to the next
#else
#define LINE_BYTES (TILE_W * (LINES ? TILE_H : 1) * ELEMENT)  // LINES: the image is as wide as a chunk, and its rows one line
#define SEGMENT (LINE_BYTES < 128 ? LINE_BYTES : 128)
#define BOXES (LINE_BYTES / SEGMENT)
#define BOX_BYTES (PIXELS * BLOCK_CI * ELEMENT / BOXES)
#define X_ROW_BYTES (BLOCK_CI * SEGMENT)
#define STEP_BYTES 32
#endif
#define X_TILE_BYTES (BOXES * BOX_BYTES)
#if CHANNELS_LAST
#define G_WIDTH (BLOCK_CO % 64 == 0 && ELEMENT == 2 ? 64 : BLOCK_CO % 32 == 0 ? 32 : 16)  // channels of a box of g, a swizzled row
#define G_BOXES (BLOCK_CO / G_WIDTH)
#if G_ONE_BOX
// GAPLESS: a plane is a tap's pixels. Else: a box brings all rows; PARTED: of a plane, the columns that taps of one remainder by STEP_W read. So a fragment's are neighbours,
// which meet different banks, and columns that no tap reads stay away. Tap t reads plane t % G_PLANES, PLANE_TAPS columns on for each G_PLANES taps.
#define G_BOX_BYTES (PLANE_COLUMNS * G_WIDTH * ELEMENT)                     // of a row
#define PLANE_BYTES ((G_ROWS * G_BOX_BYTES + 127) / 128 * 128)             // where a box may begin
#define G_SLAB_BYTES (G_PLANES * PLANE_BYTES)                               // of G_WIDTH channels
#define G_LINE PLANE_COLUMNS                                                // pixels from row to row
#elif BOX_G
#define G_BOX_BYTES ((G_COLUMNS * G_WIDTH * ELEMENT + 127) / 128 * 128)  // where a box may begin
#define G_SLAB_BYTES (G_ROWS * G_BOX_BYTES)
#define G_LINE (G_BOX_BYTES / (G_WIDTH * ELEMENT))                         // pixels from row to row
#else
#define G_LINE G_COLUMNS
#endif
#else
// CLASSED: rows off 16 bytes, where the tensor copy engine reads none, by a box for each class of rows along H and of channels:
// those of a class begin alike, and are a tensor of their own, whose rows then begin early (its lead).
#define G_CHANNELS (BLOCK_CO / CHANNEL_CLASSES)  // of a class
#define CLASS_BYTES (G_BYTES / CLASSES)
#define G_BOXES 1
#define G_BOX_BYTES (G_CHANNELS * G_PITCH * ELEMENT)
#endif
#if G_LINED                                // 1-D: the map has a channel's row as lines of 128 bytes, of which a box has some
#define G_BEGIN (128 / ELEMENT)            // elements at multiples of which boxes begin
#else
#define G_BEGIN VEC
#endif
#define G_STEP_W (PARTED ? 1 : STEP_W)        // pixels of g's tile from one of q to the next
// From one pixel of g's tile to the next (of NCHW counted in elements), and from one row to the next.
#if !CHANNELS_LAST
#define G_PIXEL_BYTES 1
#define G_ROW_BYTES G_BOX_BYTES
#elif BOX_G
#define G_PIXEL_BYTES (G_WIDTH * ELEMENT)
#define G_ROW_BYTES G_BOX_BYTES
#else
#define G_PIXEL_BYTES (G_PITCH * ELEMENT)
#define G_ROW_BYTES (G_LINE * G_PIXEL_BYTES)
#endif
#define STAGE_BYTES ((X_TILE_BYTES + G_BYTES + 1023) / 1024 * 1024)
#define RAW_AT (STAGES * STAGE_BYTES)       // x's pixels before they are turned
#define RAW_BYTES (TURN_X ? PIXELS * BLOCK_CI * ELEMENT : 0)
#define BARRIERS_AT (RAW_AT + RAW_BYTES)
#define SHARED_BYTES (BARRIERS_AT + 16 * STAGES + 16)
#if SHARED_BYTES_PLANNED != SHARED_BYTES
#error "the planner's shared memory is not the kernel's"
#endif

#define ADDS_UP (CLUSTER > 1 || TOGETHER || ALONE)
#define BY_ROWS (HANDOVER || (ALONE && A_SHARED && !STACKED))  // sums may go from registers to the weight (`put_rows`)
#if ADDS_UP
// A block's sums in shared memory, [tap][ci][co], so that a warp's fragments meet all banks: neighbours along co lie in a row, and
// ci of neighbouring lanes 2 rows apart, 8 banks.
#define SUMS_PITCH (BLOCK_CO + 4)
#define SUM_AT(tap, ci, co) (((tap) * (BLOCK_CI * SUMS_PITCH + 8) + (ci) * SUMS_PITCH + (co)) * 4)  // taps lie 8 banks apart
#define SUMS_BYTES SUM_AT(SET_TAPS, 0, 0)
#if SUMS_BYTES > BARRIERS_AT
#error "a block's sums do not fit where its stages were"
#endif
#endif

#define K_STEPS (PIXELS * ELEMENT / 32)    // a matrix instruction takes 32 bytes of K: a strip of 8 columns, or two of 16-bit types
#define STEPS (K_STEPS * ENTRIES)
#define ROW_STEPS (TILE_W * ELEMENT / 32)  // STACKED: of a row
#define SETS_OF_FRAGMENTS (ELEMENT == 2 && !CHANNELS_LAST && WGS == 3 ? 2 : 3)  // a third set spills there
#define W_STRIPS (TILE_W / 8)
#if GAPLESS && TURN_X && STRETCH != STEPS && STRETCH / ENTRIES % 4
#error "a stretch ends amid a segment of x, where the next one's steps are no sums of places"
#endif

// Half precision, NCHW: K is two pixels a word, and a tap begins at any. Units that are neighbours along W (W_RUN of them) have
// nearly all their words in common, so these are loaded once and shifted in registers.
#define W_RUN (SET_UNITS == TAPS_W ? UNITS : TAPS_W % UNITS == 0 ? UNITS : UNITS % TAPS_W == 0 ? TAPS_W : 1)
// Whether a run begins at odd elements, where that is the same for all.
#define PARITY_KNOWN (ALIGNED_G && STEP_W % 2 == 0 && W_RUN * DIL_W % 2 == 0 && (SETS_W == 1 || TAPS_W * DIL_W % 2 == 0))
#define RUN_WORDS (((PARITY_KNOWN ? PAD_W % 2 : 1) + (W_RUN - 1) * DIL_W + STEP_W) / 2 + 1)
#define SHARED_WORDS (ELEMENT == 2 && !CHANNELS_LAST && !INTERLEAVED && W_RUN > 1 && RUN_WORDS < 2 * W_RUN)
