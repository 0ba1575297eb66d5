"""Equal arrays give equal bytes, today's and those of version 0.1, and NumPy reads them."""

from __future__ import annotations

import base64
import hashlib
import io
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from bandmf_tf import _arrays
from bandmf_tf.errors import BandMFError, BandMFTypeError
from bandmf_tf.factorization.participation import SingleParticipation
from bandmf_tf.mechanisms.files import decode_mechanism, encode_mechanism
from bandmf_tf.runs.training_run import encode_model


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_released_models_have_the_bytes_of_version_0_1():
    model = {
        "kernel": np.arange(6, dtype=np.float32).reshape(2, 3) / 7,
        "bias": 0.1 * np.ones(3),
        "count": np.array(7),
        "name": np.array(["a", "bc"]),
    }
    data = encode_model(model)
    assert _digest(data) == "8131fb33feb1cd2336731c3fdf8c46203be461a718fbea4c2e3d2ece3b08bd17"
    with np.load(io.BytesIO(data)) as found:
        assert list(found) == list(model)
        for name, array in model.items():
            np.testing.assert_array_equal(found[name], array)


# A mechanism file that version 0.1 wrote: two bands, four rounds, noise multiplier 3.
FILE_OF_0_1 = (
    "c-o~_%Wm676m^oe3m51ro9-q83fqXJl9a56ogxSvv<1?%29hq?AQpz?r8G7<BxZ)T<-m)gKTx2*&}Ba(AJT1i{e+$w"
    "lA@#}-ITUOaUS<^?zv}p`t06E_jju6!Oky#{{42cyR&0IpJ61UXu+k>S^r$;^35(|9j+8#>dq0fPk7cwaYOUvEXpZK"
    "L?lR>cG@mj@ZfNSkxn#8f@n%1jXcjM8V7+tKAaNwqhyp24QLQk6!1|v;gLtdI35i7cs%x}(R4gbMq#JBX0sred{qxH"
    "7Sz99yZbG^Z|&+%w4mrhmzni{IE?+6!eBHQ&;;M3QIL$HVLY4;yzz9H90qaX;hG*|U^MlkaftCT569Cm;Df_XWigkR"
    "$Wi2S4Fw*b^N3`$w0>?#<-NQ#N6ajUVZBizEZq*4CoGr5N+}ErDatcqcDZI(3sQ7RiebX=3(~CM%G4=$LM~&bO|JOd"
    "=G~%hC-keh%g$f3uh_|}bM}zAr>?Wh5QY{pxkxgOK(3FOEVF7KVk=RtdQwOh3qH>!PaC)E=)L&%Ne_jz8JLC8ED<Sn"
    "S;S>7Ma0u|$&y^bg(3LA5@rF{&N9GKOSUpqo2EjGG?&(LSro`SL@Y7mhQ*W`-euvEaaJgC$)hDpbFC4bULgq-F+Eoz"
    "wgFv<*evXPq{xUHZdV*Lo)xJ`1jS4wOuHvJX9!*91|X!XG&3P*nt-?4XhRACrV3b(Dc^=<(@2SH)3r&W5QyGRJ+g~{"
    "+torui?*=u)=%a_(=01fBM=3ts)ncmS1}U46ue3*Ss^CKk>v(iU7~=o#Ul-75*W{-R1}S6waA?@l3ExnHOsSreaZF%"
    "w(avQIH*X`10^Ht0~CUHktCoV7|qiL@5cC=RqLb<uOT1f+Hukr+`?kRVm3hL*N!X&B#HR~#Z{VF5?ccn87M_jB@G-9"
    "$I4}G-1<A|qQ+@{MXCotxSW?MS2c|-IF`uD(gwxIuXNW21o%<mQd4|f@w$;PrpT5MuwJ7_PR@Ehz{NHTEN+O{u@>cw"
    "sUUnw!@l9A)^P01HxU{|t_M%fUa}MLM1%bV(2dBb>LtV#g3*W&4PK;Vh{a1Di-?73jxMk>6^G0M>{{e0%A3Qt8$4#D"
    "VT%J<n@R$rvi%<l^Adia%;yIT<GBQvsfp++R~Ko{V;j{IMD)Tn@;=g45|p1=MD+oC-o;FzC;@utMBw%Om8g{?gAz$o"
    "W@q~XtUo{KtQ55BYS$E~UzW^F(t=t^;=DxbNaJ8>1Tk{j0`HDE=!_Q2styi>mS4>8`~JimR7G&yWi5Bvpvz9bd%D^6"
    "ULRr&syPaP$>pjk-YdteNsZ)-M!=gRq+`W*x!u3Exly4k*T%KCEl_(5Ra@2t-WJTZL4j~gUg`g;D?$R6R5KJYWMI8B"
    "^}3GCDIa3;sppNFu?<nfWS#Z4iu(Q0U^p6i)8R0fjE3HDxFHbOHNw=|b-1eVhOF47hi>>inl<Qq)l_qWU@TaTRIP|1"
    "=eo1e<t;NZem&cmvOD|_DY2F5Mj3E~WZa1zXq8e+(L&`ok~u`Jbpz0xtYCTI1;d^f^n&S2KREI{{QumLAr+zGYB@tC"
    "b*=qg-|u^^aHDnBUuRr>wq7!tvt=#bE$OU-x`4P?7j(^|6(2zo(88UukheLSACyYVOjfMfe~N|$E9>)N&F(>C;gY8%"
    "IS#lM8cZjX@o+kswk2Lu)vZuWPKe#yv}m?axT>tHOTBkPSe#$4sb4K472~YQ-P_&Mjd#p1-pU8R;g|h<j?a5vAp5dd"
    "{{H=s&rg54vvaxgW-lgm!QK(udz4J}x@-@Pgl%$`tC;Ng*F4pD8`*O&hIrl&x;X4^+5fn9tAPJ`T;2bAeERIp-TU`G"
    "{Ic9!f85!5=hb<8?=}eS-gx&vAUS>Z@h5iKUHtuu`@>J|)4xMQcl-"
)


def test_a_mechanism_file_of_version_0_1_loads_and_keeps_its_bytes():
    data = zlib.decompress(base64.b85decode(FILE_OF_0_1))
    mechanism = decode_mechanism(data)
    assert encode_mechanism(mechanism) == data
    np.testing.assert_array_equal(mechanism.strategy.row(3), [0.5, 1.0])
    assert mechanism.participation == SingleParticipation()
    assert mechanism.noise_multiplier == 3.0
    assert mechanism.epsilon == pytest.approx(1.63466, abs=1e-5)


@given(
    st_numpy.arrays(
        st.sampled_from(["<f4", "<f8", ">f4", "<i8", "<u2", "|b1", "<U3", "|S2", "<c8"]),
        st_numpy.array_shapes(min_dims=0, max_dims=4, min_side=0),
    )
)
def test_arrays_are_written_as_numpy_writes_them(array):
    theirs = io.BytesIO()
    np.lib.format.write_array(theirs, array, version=(1, 0), allow_pickle=False)
    data = _arrays.npy(array)
    assert data == theirs.getvalue()
    found = _arrays.parse_npy("a", data, array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()


def test_the_order_in_memory_does_not_change_the_bytes():
    array = np.arange(6.0).reshape(2, 3)
    assert _arrays.npy(np.asfortranarray(array)) == _arrays.npy(array)


def test_another_dtype_shape_or_length_is_refused():
    data = _arrays.npy(np.arange(6.0))
    for changed, dtype, shape in [
        (data, "<f4", (12,)),
        (data, "<f8", (2, 3)),
        (data + b"x", "<f8", (6,)),
    ]:
        with pytest.raises(BandMFError, match="the array a is not"):
            _arrays.parse_npy("a", changed, np.dtype(dtype), shape)


def test_python_objects_are_not_written():
    with pytest.raises(BandMFTypeError, match="numbers and fixed strings"):
        _arrays.npy(np.array([object()]))
