//! Emulates the instructions of AMX on processors without it: a handler of the signal that such an instruction raises
//! computes what it does, from the operations in Intel's Software Developer's Manual, volume 2.

use pagetide_backend::cpu::{Isa, assume_tiles};
use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::sync::Once;

/// Makes `Isa::Amx` available if the processor has AVX-512: it is emulated where it is not there.
pub fn install() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        if Isa::Avx512.is_available() && !Isa::Amx.is_available() {
            // SAFETY: the handler is of the right type, and it emulates all instructions on tiles that the kernels use.
            unsafe {
                let mut action: libc::sigaction = MaybeUninit::zeroed().assume_init();
                action.sa_sigaction = on_illegal_instruction as *const () as usize;
                action.sa_flags = libc::SA_SIGINFO;
                assert_eq!(libc::sigaction(libc::SIGILL, &action, std::ptr::null_mut()), 0);
                assume_tiles();
            }
        }
    });
}

const NUM_TILES: usize = 8;
const MAX_ROWS: usize = 16;
const ROW_BYTES: usize = 64;

/// The tile registers of a thread.
struct Tiles {
    rows: [usize; NUM_TILES],
    row_bytes: [usize; NUM_TILES],
    data: [[[u8; ROW_BYTES]; MAX_ROWS]; NUM_TILES],
}

thread_local! {
    static TILES: UnsafeCell<Tiles> = const {
        UnsafeCell::new(Tiles {
            rows: [0; NUM_TILES],
            row_bytes: [0; NUM_TILES],
            data: [[[0; ROW_BYTES]; MAX_ROWS]; NUM_TILES],
        })
    };
}

/// The general registers in the order of their numbers.
const REGISTERS: [i32; 16] = [
    libc::REG_RAX,
    libc::REG_RCX,
    libc::REG_RDX,
    libc::REG_RBX,
    libc::REG_RSP,
    libc::REG_RBP,
    libc::REG_RSI,
    libc::REG_RDI,
    libc::REG_R8,
    libc::REG_R9,
    libc::REG_R10,
    libc::REG_R11,
    libc::REG_R12,
    libc::REG_R13,
    libc::REG_R14,
    libc::REG_R15,
];

extern "C" fn on_illegal_instruction(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the system passes the thread's context, whose instruction pointer is at the instruction. The signal is
    // raised by an instruction of this thread, so nothing else uses its tiles now.
    unsafe {
        let registers = &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs;
        let at = registers[libc::REG_RIP as usize] as *const u8;
        match TILES.with(|tiles| (*tiles.get()).emulate(at, registers)) {
            Some(len) => registers[libc::REG_RIP as usize] += len as i64,
            // Some other instruction: it is raised again, and ends the process.
            None => drop(libc::signal(libc::SIGILL, libc::SIG_DFL)),
        }
    }
}

/// A memory operand: the address of the first row, and bytes from row to row.
struct Rows {
    first: *mut u8,
    stride: usize,
}

impl Tiles {
    /// Does what the instruction at an address does. Returns its length, or `None` if it is none of AMX.
    ///
    /// # Safety
    /// An instruction is there, and what it reads and writes may be read and written.
    unsafe fn emulate(&mut self, at: *const u8, registers: &[i64; 23]) -> Option<usize> {
        // SAFETY: the caller's promise. All instructions on tiles have a prefix of three bytes, an opcode and a byte
        // with operands.
        unsafe {
            let [vex, inverted, rest, opcode, operands] = *at.cast::<[u8; 5]>();
            if vex != 0xc4 || inverted & 0x1f != 2 {
                return None;
            }
            let prefix = rest & 3;
            let (of_reg, of_rm, of_vex) = (operands >> 3 & 7, operands & 7, !(rest >> 3) & 7);
            let [reg, rm, vex] = [of_reg, of_rm, of_vex].map(usize::from);
            match (opcode, prefix, operands >> 6) {
                (0x49, 0, 3) => self.rows = [0; NUM_TILES], // tilerelease
                (0x49, 3, 3) => self.data[reg] = [[0; ROW_BYTES]; MAX_ROWS],
                (0x49, 0, _) => {
                    let (config, len) = memory_operand(at, inverted, registers);
                    self.configure(config.first);
                    return Some(len);
                }
                (0x4b, 1..=3, 0..=2) => {
                    let (memory, len) = memory_operand(at, inverted, registers);
                    self.copy(reg, memory, prefix == 2);
                    return Some(len);
                }
                (0x5c, 2, 3) => self.multiply(reg, rm, vex, add_bf16),
                (0x5e, 3, 3) => self.multiply(reg, rm, vex, add_bytes::<true, true>),
                (0x5e, 2, 3) => self.multiply(reg, rm, vex, add_bytes::<true, false>),
                (0x5e, 1, 3) => self.multiply(reg, rm, vex, add_bytes::<false, true>),
                (0x5e, 0, 3) => self.multiply(reg, rm, vex, add_bytes::<false, false>),
                _ => return None,
            }
            Some(5)
        }
    }

    /// # Safety
    /// A configuration is there.
    unsafe fn configure(&mut self, config: *const u8) {
        // SAFETY: the caller's promise: 64 bytes.
        let config = unsafe { *config.cast::<[u8; 64]>() };
        for tile in 0..NUM_TILES {
            self.row_bytes[tile] = usize::from(u16::from_le_bytes([config[16 + 2 * tile], config[17 + 2 * tile]]));
            self.rows[tile] = usize::from(config[48 + tile]);
        }
        self.data = [[[0; ROW_BYTES]; MAX_ROWS]; NUM_TILES];
    }

    /// Stores a tile or loads it.
    ///
    /// # Safety
    /// The memory has its rows.
    unsafe fn copy(&mut self, tile: usize, memory: Rows, stores: bool) {
        let row_bytes = self.row_bytes[tile];
        if !stores {
            self.data[tile] = [[0; ROW_BYTES]; MAX_ROWS];
        }
        for row in 0..self.rows[tile] {
            let (in_memory, in_tile) = (memory.first.wrapping_add(row * memory.stride), &mut self.data[tile][row]);
            // SAFETY: the caller's promise.
            unsafe {
                match stores {
                    true => std::ptr::copy(in_tile.as_ptr(), in_memory, row_bytes),
                    false => std::ptr::copy(in_memory, in_tile.as_mut_ptr(), row_bytes),
                }
            }
        }
    }

    /// Multiplies tiles `a` and `b`. `sum` adds the products of words of a row and of a column to a word.
    fn multiply(&mut self, out: usize, a: usize, b: usize, sum: impl Fn([u8; 4], &[[[u8; 4]; 2]]) -> [u8; 4]) {
        let word = |line: &[u8; ROW_BYTES], at: usize| [0, 1, 2, 3].map(|byte| line[4 * at + byte]);
        for row in 0..self.rows[out] {
            for column in 0..self.row_bytes[out] / 4 {
                let mut words = [[[0; 4]; 2]; MAX_ROWS];
                let words = &mut words[..self.row_bytes[a] / 4];
                for (step, words) in words.iter_mut().enumerate() {
                    *words = [word(&self.data[a][row], step), word(&self.data[b][step], column)];
                }
                let result = sum(word(&self.data[out][row], column), words);
                self.data[out][row][4 * column..][..4].copy_from_slice(&result);
            }
        }
    }
}

/// `tdpbf16ps`: the even and the odd elements of the words have a sum each.
fn add_bf16(sum: [u8; 4], words: &[[[u8; 4]; 2]]) -> [u8; 4] {
    let element =
        |word: [u8; 4], at: usize| f32::from_bits(u32::from(u16::from_le_bytes([word[at], word[at + 1]])) << 16);
    let [even, odd] =
        [0, 2].map(|at| words.iter().fold(0.0_f32, |sum, [a, b]| element(*a, at).mul_add(element(*b, at), sum)));
    (f32::from_le_bytes(sum) + (even + odd)).to_le_bytes()
}

/// `tdpbssd` and the like. `A` and `B` say whether the bytes of the rows and of the columns have a sign.
fn add_bytes<const A: bool, const B: bool>(sum: [u8; 4], words: &[[[u8; 4]; 2]]) -> [u8; 4] {
    let value = |byte: u8, is_signed: bool| if is_signed { i32::from(byte as i8) } else { i32::from(byte) };
    let products = words.iter().flat_map(|[a, b]| a.iter().zip(b)).map(|(a, b)| value(*a, A) * value(*b, B));
    (i32::from_le_bytes(sum) + products.sum::<i32>()).to_le_bytes()
}

/// The memory operand of the instruction, and the instruction's length.
///
/// # Safety
/// An instruction with a memory operand is there.
unsafe fn memory_operand(at: *const u8, inverted: u8, registers: &[i64; 23]) -> (Rows, usize) {
    // SAFETY: the caller's promise; the operand's parts follow each other.
    unsafe {
        let (mode, rm) = (*at.add(4) >> 6, *at.add(4) & 7);
        let register = |low: u8, bit: u8| low + if inverted & bit == 0 { 8 } else { 0 };
        let value = |register: u8| registers[REGISTERS[usize::from(register)] as usize];
        let (base, stride, displacement_at) = if rm == 4 {
            let sib = *at.add(5);
            let index = register(sib >> 3 & 7, 0x40);
            let stride = if index == 4 { 0 } else { value(index) << (sib >> 6) };
            (sib & 7, stride, at.add(6))
        } else {
            (rm, 0, at.add(5))
        };
        assert!(mode != 0 || base != 5, "an operand without a base register is not emulated");
        let (displacement, len) = match mode {
            0 => (0, 0),
            1 => (i64::from(*displacement_at.cast::<i8>()), 1),
            _ => (i64::from(displacement_at.cast::<i32>().read_unaligned()), 4),
        };
        let first = (value(register(base, 0x20)) + displacement) as *mut u8;
        (Rows { first, stride: stride as usize }, displacement_at.offset_from_unsigned(at) + len)
    }
}
